"""Files of other tools, a module each; what reads them by a name is registered in ``data/base/plugins.tsv``."""
