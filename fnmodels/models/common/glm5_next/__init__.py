"""Parts of GLM 5.3 Flash: its config.json, its parameters and their names on disk."""
