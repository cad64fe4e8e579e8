"""What a report says, and one HTML file of all reports, which asks for nothing outside itself."""
