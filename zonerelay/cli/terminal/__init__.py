"""How commands print: tables and JSON, texts for people, a progress bar, exit statuses."""
