"""Filter-wise optimal transport: bring a station's channels into the reference's order."""
