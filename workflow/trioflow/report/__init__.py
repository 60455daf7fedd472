"""The report: errors, figures, timelines, pages."""
