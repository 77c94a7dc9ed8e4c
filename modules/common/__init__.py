"""Networks and maths that two or more methods share, named by what they do."""
