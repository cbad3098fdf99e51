"""One liar moves little: bounds on what an update may change, and rules that choose among updates."""
