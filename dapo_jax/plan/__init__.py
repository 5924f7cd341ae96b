"""Before anything is paid for: what a run needs and takes on devices that are not here."""
