"""The values of mail in the words of the RFCs: frozen, standard library only, without I/O and `await`."""
