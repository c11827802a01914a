"""Training draft heads, and making the data for it. Needs the extra `train`."""
