"""Log masses of pages, exact or from their summaries."""
