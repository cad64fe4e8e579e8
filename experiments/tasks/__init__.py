"""Small tasks that the papers train on: data made up or read from local files, and a learner."""
