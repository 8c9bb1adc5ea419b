"""`headrace view`: a run's samples, tokens, ledger and curves as a page. Its source is in web/."""
