"""What is installed: the wheel, the sdist, the extras, the images, the public names."""
