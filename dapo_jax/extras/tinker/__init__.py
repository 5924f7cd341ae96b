"""Server of Tinker's API: training loops of other programs on this library's learner and engine."""
