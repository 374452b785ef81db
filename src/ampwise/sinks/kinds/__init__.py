"""One module a kind of sink, named as the user names it."""
