"""What every room needs: units, errors, input files, provenance, settings, the row of a plan."""
