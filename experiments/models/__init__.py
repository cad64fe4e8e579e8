"""Models and mechanisms that only studies use, for one device."""
