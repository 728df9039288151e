"""Page lists from attention shares."""
