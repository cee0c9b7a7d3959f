"""One Unix socket through which operators ask and command."""
