"""Real servers, certificates and leak checks for the tests; nothing here is mocked."""
