"""Model families as data: reading a config.json, the table of weights, presets. One file a family; no torch."""
