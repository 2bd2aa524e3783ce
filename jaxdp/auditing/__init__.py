"""What an attacker can force out of a mechanism: valid lower bounds on epsilon."""
