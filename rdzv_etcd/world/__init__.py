"""What a program holds: groups, worlds and observers; and what a world offers its members."""
