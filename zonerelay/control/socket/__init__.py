"""The control socket's file, and the socket on which a worker answers its supervisor."""
