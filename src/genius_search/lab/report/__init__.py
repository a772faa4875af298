"""Reports: tables, figures, statistics and the page of results."""
