"""What a person looks at: the page of results."""
