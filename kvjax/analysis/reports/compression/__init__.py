"""Report on low-rank keys: can a fixed subspace hold a head's keys?"""
