"""The tier that holds the data: trains and evaluates what its station sends."""
