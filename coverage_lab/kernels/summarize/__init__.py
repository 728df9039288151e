"""Page summaries: what an estimator keeps of the keys of a page."""
