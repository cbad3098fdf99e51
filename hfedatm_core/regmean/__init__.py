"""RegMean: merge Linear layers in closed form, given the Grams of their inputs."""
