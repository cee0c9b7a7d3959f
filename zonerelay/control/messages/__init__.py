"""The requests and answers of the control socket, and their form: one JSON object per line."""
