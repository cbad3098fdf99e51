"""All the code that a laboratory adds to HFedATM."""
