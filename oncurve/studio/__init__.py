"""The web server: every run, group and number to be looked at in a browser. Reads run folders; never trains."""
