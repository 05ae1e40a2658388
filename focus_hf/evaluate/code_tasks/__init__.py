"""Tasks on code where far tokens decide, made of the standard library: nothing is downloaded."""
