"""Worker processes that can be killed."""
