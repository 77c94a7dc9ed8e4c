"""The claim engine behind ``fulgurite reproduce``: plan, worker, statistics, report."""
