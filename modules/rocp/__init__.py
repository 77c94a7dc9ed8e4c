"""Risk-optimal conformal prediction (ROCP) and the classifier that it calibrates."""
