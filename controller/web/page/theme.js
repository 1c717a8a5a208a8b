// Before anything is painted: the theme that the reader chose, if any.
const theme = localStorage.getItem("outlast-theme");
if (theme) document.documentElement.dataset.theme = theme;
