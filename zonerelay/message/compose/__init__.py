"""Makes messages from text, HTML and files: `compose` is the face, `mime` writes the parts."""
