"""The verifier `code`: programs run with the tests of their rows in a sandbox; needs bubblewrap."""
