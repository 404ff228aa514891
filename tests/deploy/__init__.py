"""The documents and manifests for operators do what they say."""
