// A cell that leads to a page: text and address come as data, React writes both.
window.dashAgGridComponentFunctions = window.dashAgGridComponentFunctions || {};

window.dashAgGridComponentFunctions.PageLink = function (cell) {
    if (!cell.data || !cell.data.href) {
        return null;
    }
    return React.createElement(window.dash_core_components.Link, { href: cell.data.href }, String(cell.value));
};

// A number that is read by its sign first.
window.dashAgGridComponentFunctions.Signed = function (cell) {
    const words = cell.value === undefined ? "" : String(cell.value);
    const look = words.startsWith("+") ? "above" : words.startsWith("-") ? "below" : "";
    return React.createElement("span", { className: look }, words);
};
