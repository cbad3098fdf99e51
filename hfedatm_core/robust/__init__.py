"""One liar moves little: bounds on what an update may change, and rules to choose among updates."""
