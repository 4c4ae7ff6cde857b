"""Long and paired loads of servers, each run once for a page: soak, crowd, other clients, drafts, probed servers."""
