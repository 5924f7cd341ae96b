"""Mathematical equivalence of answers, by itself: it imports nothing above `runtime.workers`."""
