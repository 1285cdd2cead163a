"""What accompanies training and may end it: requests from outside."""
