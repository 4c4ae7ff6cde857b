"""Study 07: N processes with a sequence each against one process with N sequences."""
