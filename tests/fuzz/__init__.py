"""Hundreds of odd command lines, and one oracle for all: status, one message, nothing lost."""
