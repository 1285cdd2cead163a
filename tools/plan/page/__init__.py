"""--report: one HTML file with pictures, which needs no network."""
