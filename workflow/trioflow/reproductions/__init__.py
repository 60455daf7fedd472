"""Other papers and public measurements: judged cases, pages, figures and studies; the core never imports it."""
