"""Rules that decide which pages a row reads: estimator x budget x granularity."""
