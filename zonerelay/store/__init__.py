"""Where accepted mail lives until its outcome is stored."""
