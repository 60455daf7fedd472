"""What is worth measuring on a GPU that is there for some minutes: ``config/campaign.tsv`` by rules/campaign.smk."""
