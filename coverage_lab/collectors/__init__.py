"""Run models on prompts and record what their attention needs."""
