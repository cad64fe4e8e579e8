"""Models and mechanisms that only studies use; of one device."""
